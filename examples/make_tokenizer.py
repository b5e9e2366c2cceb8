"""Trains a small tokenizer on a JSONL file: ``python examples/make_tokenizer.py DATA.jsonl OUT --vocab 2048``."""

from realhf.apps.demo.make_tokenizer import main

if __name__ == "__main__":
    main()
