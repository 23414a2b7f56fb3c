"""Text: words to ids (`tokenizer.py`), ids to words as they come (`detokenizer.py`), where to stop (`stop_strings.py`),
and the three together for one request (`output_text.py`)."""
