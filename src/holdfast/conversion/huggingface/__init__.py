"""Hugging Face model folders: configuration, tensor names, tokenizer files, reading and writing."""
