"""The task of ``realhf demo``: data, tokenizer and model config, made from nothing."""
