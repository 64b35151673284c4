"""Hash that tells whether trainer, server and teacher have the same tokenizer."""

import hashlib
import json
from typing import Any

# Contains what tokenizers differ in: digits, spaces, a control token, another script.
PROBE = "2 + 40 = 42 <|im_end|>\n\tf(x_1) = Ünï 日本"


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's vocabulary and of its split of a fixed text; if it differs, so do the token ids."""
    facts = [sorted(tokenizer.get_vocab().items()), list(tokenizer.encode(PROBE, add_special_tokens=False))]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
