"""From text to tokens: reading a corpus, the tokenizer, memory-mapped token files."""
