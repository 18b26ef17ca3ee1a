"""Conversion: Megatron ↔ Hugging Face ↔ Holdfast. Readers give a Model (canonical names), writers make a plan of it."""
