"""The whole path on this machine, offline, in a few minutes: text → tokenizer → dataset → training, with a rank killed on the way
→ Hugging Face → text."""
