"""Conversion: Megatron ↔ Hugging Face ↔ Holdfast. Readers return a Model (canonical names); writers plan the files of one."""
