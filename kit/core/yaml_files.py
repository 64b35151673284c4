"""Read YAML that a user wrote, within bounds: a small file cannot take the memory or the time of a large one.

Plain YAML only: no tags, integers of at most 63 bits, and dates are text. Imports no torch.
"""

from pathlib import Path
from typing import Any

import yaml

from kit.core.errors import BadInput
from kit.core.user_files import read_text

MOST_BYTES = 1 << 17
MOST_DEPTH = 32
MOST_NODES = 10_000  # values of a document once its aliases are written out
INTEGERS = 2**63


class StrictLoader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys, tags, and documents that are too deep or too large once written out.

    PyYAML silently keeps the last of two keys, follows an alias into itself, and copies merged groups, so that ten
    lines of aliases to aliases take all memory.
    """

    depth = made = 0

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        """Scan a bracket. After a thousand of them PyYAML looks at each open one again for every token."""
        if self.flow_level >= MOST_DEPTH:
            self._refuse(f"more than {MOST_DEPTH} levels", self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Compose a node and count what it holds; an alias counts as what it stands for."""
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            self._refuse(f"the tag {event.tag}; write plain values", event.start_mark)
        self.depth, self.made = self.depth + 1, self.made + 1
        if self.depth > MOST_DEPTH:
            self._refuse(f"more than {MOST_DEPTH} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, yaml.AliasEvent) and not hasattr(node, "size"):
            self._refuse(f"the alias *{event.anchor} inside what it stands for", event.start_mark)
        if not isinstance(event, yaml.AliasEvent):
            held = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else node.value
            node.size = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(one.size for one in held))
        if max(node.size, self.made) > MOST_NODES:
            self._refuse(f"more than {MOST_NODES:,} values", event.start_mark)
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Compose a group as PyYAML does; raise `yaml.YAMLError` with the line of a duplicate key."""
        node, seen = super().compose_mapping_node(anchor), set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, "a key that is not text", key.start_mark)
            if key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"duplicate key {key.value}", key.start_mark)
            seen.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value; raise `yaml.YAMLError` for one that Python or JSON cannot carry."""
        try:
            value = super().construct_object(node, deep)
        except ValueError:  # 0b_, or more digits than Python converts
            raise self._unusable(node, "is not a number that can be read") from None
        if type(value) is int and abs(value) >= INTEGERS:
            raise self._unusable(node, "is an integer of more than 63 bits")
        if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            raise self._unusable(node, "has a NUL or an unpaired surrogate")
        return value

    def _unusable(self, node: yaml.Node, why: str) -> yaml.YAMLError:
        return yaml.constructor.ConstructorError(None, None, f"{node.value!r:.60} {why}", node.start_mark)

    def _refuse(self, what: str, mark: yaml.Mark) -> None:
        raise yaml.composer.ComposerError(None, None, f"it has {what}", mark)


# A date would be the only value that JSON cannot carry.
StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag != "tag:yaml.org,2002:timestamp"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str) -> Any:
    """The value of a YAML document; raises `ValueError` with the line and what is wrong there."""
    try:
        return yaml.load(text, StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        raise ValueError(f"position {error.position + 1}: the character {chr(error.character)!r}") from None
    except OverflowError:
        raise ValueError("an escape such as \\U99999999 that is no character") from None


def read_yaml(path: str | Path, what: str = "YAML file") -> Any:
    """The value of a YAML file; `BadInput` if it cannot be read."""
    text = read_text(path, MOST_BYTES, what)
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise BadInput(f"{path} is not YAML: {error}.") from None
