"""The decoder, its stages, its tokenizer, and Hugging Face folders in and out."""
