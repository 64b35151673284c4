"""The Modelfile beside a GGUF file, and the chat template inside it as Ollama is to use it.

Ollama from 0.30.11 on renders prompts by the chat template in the file, with llama-server's Jinja, unless the model
has a TEMPLATE in Go's syntax. `ollama create` adds one if the file's template is at an edit distance below 100 from
one of Ollama's own list (server/model.go and template/template.go, v0.33.0-rc2). Either would render other prompts
than the trained ones, so no TEMPLATE is written, and a comment of 200 characters keeps Ollama from adding its own.
"""

from pathlib import Path
from typing import Any

from kit.core.chat import model_stop_tokens
from kit.core.errors import BadInput
from merge.chat_template import prepended

OLLAMA = "0.30.11"  # the first version whose `generate` renders by the file's template too
EDIT_DISTANCE = 100  # below which Ollama takes a template of its own list
COMMENT = "{#- The template that this model was trained with follows. Ollama replaces a template that differs by less "
COMMENT += (
    f"than {EDIT_DISTANCE} characters from one of its own list; with this comment before it, none is as near. #}}"
)


def kept_as_it_is(template: str) -> str:
    """The template with a comment before it that renders as nothing and keeps Ollama from replacing it."""
    return prepended(COMMENT, template)


def modelfile(config: dict, checkpoint: Path, tokenizer: Any, file: str) -> str:
    """Text of the Modelfile for the GGUF `file` beside it: the run's system prompt, and the settings that its
    evaluation generates with."""
    name = file.removesuffix(".gguf")
    lines = [f"# ollama create {name} -f Modelfile && ollama run {name}", f"REQUIRES {OLLAMA}", f"FROM ./{file}"]
    data = config.get("data") or {}
    if system := data.get("system_prompt"):
        lines.append(instruction("SYSTEM", system))
    if suffix := data.get("prompt_suffix"):
        lines.insert(0, f"# The training appended {suffix!r} to every question; a Modelfile cannot.")
    for key, value in parameters(config).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadInput(f"the run's config.json has {value!r:.60} where {key} of the Modelfile needs a number.")
        lines.append(f"PARAMETER {key} {value}")
    if texts := (config.get("rollout") or {}).get("stop"):
        lines.append("# Completions of the training end with these texts, which Ollama leaves out of its answer.")
        lines += [instruction("PARAMETER stop", text) for text in texts]
    if tokenizer.chat_template:
        stops = tokenizer.convert_ids_to_tokens(model_stop_tokens(checkpoint, tokenizer))
        lines += [instruction("PARAMETER stop", stop) for stop in stops]
    return "\n".join(lines) + "\n"


def instruction(name: str, text: str) -> str:
    """A line with a text that may hold line feeds. Between three quotes Ollama takes everything literally; a text that
    holds three quotes itself is left out, since there is no way to escape them."""
    if '"""' in text or text.endswith('"'):
        return f"# {name} is left out, since its text cannot be quoted: {text!r}"
    return f'{name} """{text}"""'


def parameters(config: dict) -> dict[str, float | int]:
    """Ollama's parameters that sample as the run's evaluation does, with its lengths."""
    evaluation, rollout = config.get("eval") or {}, config.get("rollout") or {}
    longest, completion = rollout.get("max_prompt_length"), rollout.get("max_completion_length")
    if new := evaluation.get("max_new_tokens"):
        completion = new
    # Ollama's defaults sample by top_k 40 and top_p 0.9, its earlier ones penalized repetitions.
    sampling = {"top_k": 0, "top_p": 1, "min_p": 0, "repeat_penalty": 1}
    lengths = {"num_ctx": longest + completion, "num_predict": completion} if longest and completion else {}
    return {"temperature": evaluation.get("temperature", 0), **sampling, **lengths}
