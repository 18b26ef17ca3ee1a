"""The demo: text → tokenizer → dataset → training, in which a rank is killed → Hugging Face → text; offline, on this machine."""
