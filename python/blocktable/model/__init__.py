"""Models: transformers' own, unmodified, with paged attention under them. Needs the extra `engine`.

Before: `engine/llm.py` names a model. After: a `ModelRunner` that turns plans into logits. `loader` loads and checks, `runner`
runs; in between lie the bridge into transformers' attention, the KV geometry and the KV memory.
"""
