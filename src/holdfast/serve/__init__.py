"""`holdfast serve`: an OpenAI-compatible HTTP server and a playground over the generation engine.

The only package that needs the optional extra `serve` (starlette, uvicorn, jinja2).
"""
