"""Values of shell words: quotes, parameters, arrays, arithmetic. No command runs; what it would tell is named."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tree_sitter import Node


class Word(NamedTuple):
    """A word, or part of one, and why parts of it are unknown: ``"line 3: `date` was not run"``."""

    text: str = ""
    unknown: tuple[str, ...] = ()
    line: int = 0

    def __add__(self, other: object) -> Word:
        assert isinstance(other, Word)
        return Word(self.text + other.text, self.unknown + other.unknown, self.line or other.line)


@dataclass
class Scope:
    """Variables of a script while it is read."""

    variables: MutableMapping[str, list[Word]]
    positional: list[Word] = field(default_factory=list)
    output: Callable[[Node], Word] = lambda node: unknown(node, "was not run")
    """What a command substitution prints."""

    def get(self, name: str, node: Node) -> list[Word]:
        """The value of a variable; unset ones are unknown, except for ``$HOME`` (``~``) and ``$PWD``."""
        if name in ("@", "*"):
            return self.positional
        if name == "#":
            return [Word(str(len(self.positional))) if self.positional else unknown(node, "depends on the call")]
        if name.isdigit() and 0 < int(name) <= len(self.positional):
            return [self.positional[int(name) - 1]]
        if name in self.variables:
            return self.variables[name]
        known = {"HOME": "~", "PWD": "."}.get(name)
        return [unknown(node, f"{UNSET} set")] if known is None else [Word(known)]


UNSET = "is not"


def line_of(node: Node) -> int:
    return node.start_point[0] + 1


def source(node: Node) -> str:
    return (node.text or b"").decode()


def unknown(node: Node, why: str) -> Word:
    """A word that is known only when the script runs."""
    text = " ".join(source(node).split())
    return Word("", (f"line {line_of(node)}: `{text}` {why}",), line_of(node))


def expand(node: Node, scope: Scope) -> list[Word]:
    """The words that a word of the script becomes; an unquoted parameter may become several or none."""
    if (array := _all_of(node, scope)) is not None:
        return array
    if node.type in ("simple_expansion", "expansion", "command_substitution"):
        word = value(node, scope)
        parts = word.text.split()
        return [Word(part, word.unknown, line_of(node)) for part in parts] or [word] * bool(word.unknown)
    return [value(node, scope)._replace(line=line_of(node))]


def _all_of(node: Node, scope: Scope) -> list[Word] | None:
    """All elements, for ``"$@"`` and ``"${name[@]}"``."""
    inner = node.named_children[0] if node.type == "string" and len(node.named_children) == 1 else node
    if inner.type not in ("simple_expansion", "expansion"):
        return None
    text = source(inner)
    if node.type == "string" and source(node) != f'"{text}"':
        return None
    if match := re.fullmatch(r"\$\{?[@*]\}?", text):
        return list(scope.positional)
    if match := re.fullmatch(r"\$\{(\w+)\[[@*]\](?::?[-+].*)?\}", text, re.DOTALL):
        return [word._replace(line=word.line or line_of(node)) for word in scope.variables.get(match[1], [])]
    return None


def value(node: Node, scope: Scope) -> Word:
    """The text of a word, without splitting."""
    match node.type:
        case "raw_string":
            return Word(source(node)[1:-1])
        case "ansi_c_string":
            return Word(str(ast.literal_eval(source(node)[1:])))
        case "string" | "heredoc_body":
            return _quoted(node, scope)
        case "concatenation":
            return _sum(value(child, scope) for child in node.children)
        case "simple_expansion":
            return _joined(scope.get(source(node)[1:], node))
        case "expansion":
            return _parameter(node, scope)
        case "command_substitution":
            return scope.output(node)
        case "arithmetic_expansion":
            return _arithmetic(node, scope)
        case "process_substitution":
            return unknown(node, "was not run")
        case "word" | "number" | "extglob_pattern" | "regex":
            return Word(re.sub(r"\\(\n|.)", lambda m: "" if m[1] == "\n" else m[1], source(node)))
        case _:
            return Word(source(node))


def _sum(words: Iterator[Word]) -> Word:
    total = Word()
    for word in words:
        total += word
    return total


def _joined(words: Sequence[Word]) -> Word:
    return Word(" ".join(w.text for w in words), tuple(u for w in words for u in w.unknown))


def _quoted(node: Node, scope: Scope) -> Word:
    """Text between double quotes or of a here-document: expansions, and the text between them."""
    raw, base, total = node.text or b"", node.start_byte, Word()
    quotes = 1 if node.type == "string" else 0
    position = quotes
    for child in node.named_children:
        if child.type in ("string_content", "heredoc_content"):
            continue
        total += Word(_unescaped(raw[position : child.start_byte - base]))
        total += value(child, scope)
        position = child.end_byte - base
    return total + Word(_unescaped(raw[position : len(raw) - quotes]))


def _unescaped(raw: bytes) -> str:
    return re.sub(r'\\([\n"$`\\])', lambda m: "" if m[1] == "\n" else m[1], raw.decode())


def _parameter(node: Node, scope: Scope) -> Word:
    """``${name}`` and its forms with a default, a prefix or a suffix to remove, or a change of case."""
    text = source(node)[2:-1]
    found = re.match(r"([A-Za-z_]\w*|[@*#0-9])(\[[^\]]*\])?(:?[-=+?]|##?|%%?|,,|\^\^|$)", text)
    if found is None:
        return unknown(node, "is not read")
    name, index, sign = found.groups()
    words = scope.get(name, node)
    if index and index not in ("[@]", "[*]"):
        words = words[int(index[1:-1]) :][:1] if index[1:-1].isdigit() else [unknown(node, "is not read")]
    now = _joined(words)
    rest = [child for child in node.named_children if child.start_byte >= node.start_byte + 2 + found.end()]
    if sign[-1:] in ("-", "=", "?", "+") and sign:
        unset = name not in scope.variables and all(UNSET in why or "depends" in why for why in now.unknown)
        missing = (unset and not now.text) or (sign[0] == ":" and not now.text and not now.unknown)
        other = _sum(value(child, scope) for child in rest)
        if sign[-1] == "+":
            return Word() if missing else other
        if not missing or sign[-1] == "?":
            return now
        if sign[-1] == "=":
            scope.variables[name] = [other]
        return other
    if sign in (",,", "^^"):
        return now._replace(text=now.text.lower() if sign == ",," else now.text.upper())
    return now._replace(text=_removed(now.text, sign, text[found.end() :])) if sign else now


def _removed(text: str, sign: str, pattern: str) -> str:
    """`text` without the part at its start (#) or end (%) that matches; doubled, the longest such part."""
    cuts = range(len(text) + 1)
    if sign[0] == "#":
        fits = [cut for cut in cuts if fnmatch.fnmatchcase(text[:cut], pattern)]
        return text[(fits[-1] if len(sign) == 2 else fits[0]) :] if fits else text
    fits = [cut for cut in cuts if fnmatch.fnmatchcase(text[cut:], pattern)]
    return text[: (fits[0] if len(sign) == 2 else fits[-1])] if fits else text


_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: lambda a, b: int(a / b),
}


def _arithmetic(node: Node, scope: Scope) -> Word:
    """``$((1024 * n))`` with the four operations and parentheses."""
    text = source(node)[3:-2].strip()
    reasons: list[str] = []

    def number(match: re.Match[str]) -> str:
        word = _joined(scope.get(match[1] or match[2], node))
        reasons.extend(word.unknown)
        return word.text or "0"

    try:
        tree = ast.parse(re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?|\$([0-9])", number, text).replace("/", "//"), mode="eval")
        return Word("" if reasons else str(_computed(tree.body)), tuple(reasons))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
        return unknown(node, "is not read")


def _computed(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_computed(left), _computed(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand)
    raise ValueError(node)
