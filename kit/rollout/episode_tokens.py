"""The messages of an episode as tokens: its prompt, what follows a turn of the model, and a turn as a message.

What the model sampled is never decoded and encoded again. The messages after a turn are rendered behind a dummy
conversation, and only the tokens behind it are appended, as TRL does (trl 1.16, `GRPOTrainer._get_tool_suffix_ids`);
tests/unit/test_episode_tokens.py compares both.
"""

from typing import Any

from kit.core.chat import token_ids
from kit.core.errors import BadInput
from kit.environments.episode import Message

CHARACTERS = 64  # that a token stands for, at most; longer ones are runs of spaces
_USER: Message = {"role": "user", "content": "dummy"}


class EpisodeTokens:
    """Renders for one tokenizer with `arguments` of its chat template (`data.chat_template_kwargs`).

    A template that renders earlier messages differently once others follow is replaced by TRL's training template for
    it. Raises `BadInput` if there is none or, with `takes_tools`, if the template renders no tools or nothing can
    parse the model's calls.
    """

    def __init__(self, tokenizer: Any, arguments: dict[str, Any], takes_tools: bool):
        self.tokenizer, self.arguments, self.takes_tools = tokenizer, arguments, takes_tools
        self.template: str | None = None  # None: the tokenizer's own
        self.name = getattr(tokenizer, "name_or_path", None) or "the tokenizer"
        if takes_tools:
            self._check_tools()
        self._use_prefix_preserving()

    def _check_tools(self) -> None:
        from trl.chat_template_utils import add_response_schema, supports_tool_calling

        if not supports_tool_calling(self.tokenizer):
            raise BadInput(
                f"environment: the chat template of {self.name} cannot render tools: it drops calls or their results. "
                "Use a model whose template has both (Qwen2.5, Qwen3, Llama 3.1), or leave the tools out."
            )
        if any(getattr(self.tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
            return
        try:
            add_response_schema(self.tokenizer)
        except ValueError:
            raise BadInput(
                f"environment: nothing can parse the tool calls of {self.name}: its tokenizer has no "
                "response_template and trl knows none for its chat template. Set response_template in "
                "tokenizer_config.json of a local copy (model.path), as transformers' page on response parsing shows."
            ) from None

    def _use_prefix_preserving(self) -> None:
        """Choose a template by which messages can be appended behind a turn."""
        followers: list[Message] = [{"role": "user", "content": "dummy"}]
        if self.takes_tools:
            followers.append({"role": "tool", "name": "dummy", "content": "dummy"})
        if all(self._is_appendable(message) for message in followers):
            return
        from trl.chat_template_utils import get_training_chat_template

        try:
            self.template = get_training_chat_template(self.tokenizer)
        except ValueError:
            pass
        else:
            if all(self._is_appendable(message) for message in followers):
                return
        raise BadInput(
            f"environment: the chat template of {self.name} renders a turn differently once another message follows "
            "it, so an episode's tokens could not be those that the model sampled, and trl has no training template "
            "for it. Remove that from chat_template.jinja in a local copy (model.path)."
        )

    def _is_appendable(self, message: Message) -> bool:
        try:
            self.observation_ids([message])
        except ValueError:
            return False
        return True

    def prompt_ids(self, messages: list[Message], tools: list[dict] | None) -> list[int]:
        """Token ids of a prompt, with the model's turn opened; raises `BadInput` if the template fails on it."""
        return self._ids(messages, tools=tools or None)  # some templates render an empty list of tools

    def observation_ids(self, messages: list[Message], is_closed: bool = True) -> list[int]:
        """Token ids that follow a turn: the messages, and the next turn opened. If the turn is not `is_closed` by its
        stop token, because it ended at a stop text, that token comes first.

        Raises `ValueError` if the template changes what comes before them.
        """
        turn: Message = {"role": "assistant", "content": "" if messages[0]["role"] == "tool" else "dummy"}
        if messages[0]["role"] == "tool":
            # Some templates take the header of a result from the name of the call.
            function = {"name": messages[0].get("name", "dummy"), "arguments": {}}
            turn["tool_calls"] = [{"type": "function", "function": function}]
        before = self._ids([_USER, turn], add_generation_prompt=False)
        whole = self._ids([_USER, turn, *messages])
        # Templates may write a newline after the stop token, which was not sampled.
        ends = [place for place, token in enumerate(before) if token == self.tokenizer.eos_token_id]
        before = before[: ends[-1] + 1] if ends else before
        if whole[: len(before)] != before:
            raise ValueError("the chat template is not prefix-preserving")
        return whole[len(before) - (not is_closed and bool(ends)) :]

    def reply(self, ids: list[int], before: list[int], tools: list[dict] | None) -> Message:
        """The turn `ids` as a message, after the tokens `before`; text that is no valid call stays text."""
        if any(getattr(self.tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
            from trl.chat_template_utils import parse_response

            return parse_response(self.tokenizer, ids, prefix=before, tools=tools)
        return {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}

    def cut(self, message: Message, most: int | None, longest: int) -> Message:
        """The message with at most `most` tokens of text, and a note if that is not all of it.

        Text that no `longest` tokens can hold is cut without a note: it ends the episode.
        """
        text = message.get("content")
        if not isinstance(text, str):
            return message
        # Megabytes would take the tokenizer seconds, and every other episode waits for them.
        start = text[: CHARACTERS * (most or longest)]
        if most is None:
            return message | {"content": start}
        ids = self.tokenizer(start, add_special_tokens=False)["input_ids"]
        if len(ids) <= most and len(start) == len(text):
            return message
        shown = self.tokenizer.decode(ids[:most])
        return message | {"content": f"{shown} [cut: {len(shown)} of {len(text)} characters]"}

    def _ids(self, messages: list[Message], **form: Any) -> list[int]:
        if self.template is not None:
            form["chat_template"] = self.template
        return token_ids(self.tokenizer, messages, self.arguments, **form)
