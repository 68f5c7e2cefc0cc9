"""Commands that a shell script would start, read from its syntax tree: nothing runs, and no file is opened.

Assignments, arrays, ``if``, ``case``, ``for``, functions, here-documents and the parameters of `flowrl.importers.words`
are followed. A command in a condition or a substitution counts as failed, and each such place is noted with its line.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowrl.errors import BindError, ImporterError
from flowrl.importers.words import UNSET, Scope, Word, expand, line_of, source, unknown, value

if TYPE_CHECKING:
    from tree_sitter import Node

_QUIET = frozenset(
    {"echo", "printf", "set", "ulimit", "cd", "mkdir", "sleep", "true", ":", "unset", "source", ".", "trap"}
)
_MOST_ROUNDS = 1000


@dataclass
class Script:
    """What a script would start."""

    commands: list[list[Word]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Decisions that depend on what was not run, each with its line."""


class _Exit(Exception):
    def __init__(self, line: int) -> None:
        self.line = line


def read(text: str, name: str, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> Script:
    """Read a script.

    Args:
        name: of the file, for messages.
        environment: variables that the script finds set.
        arguments: what ``"$@"`` stands for.

    Raises:
        ImporterError: the script is not valid, or exits before it starts anything.
        BindError: tree-sitter is not installed.
    """
    reader = _Reader({name: [Word(value)] for name, value in environment.items()}, [Word(a) for a in arguments])
    try:
        reader.run(_tree(text))
    except _Exit as end:
        if not reader.script.commands:
            raise ImporterError(
                f"{name} exits on line {end.line}, before it starts a training. Pass the variables and arguments that "
                f"it expects: --env NAME=value, or arguments after the file.",
                code="import.script-exits",
                file=name,
                line=end.line,
            ) from None
    return reader.script


def _tree(text: str) -> Node:
    """The syntax tree of a script."""
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise BindError(
            "Reading a shell script needs the package tree-sitter-bash: pip install 'flowrl[importers]'.",
            code="package.not-installed",
            package="tree-sitter-bash",
        ) from error
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language())).parse(text.encode()).root_node


class _Reader:
    def __init__(self, variables: dict[str, list[Word]], positional: list[Word]) -> None:
        self.script = Script()
        self.scope = Scope(variables, positional, self._output)
        self.functions: dict[str, Node] = {}
        self.probing = False
        self.printed: list[Word] = []

    def note(self, text: str) -> None:
        if text not in self.script.notes:
            self.script.notes.append(text)

    def run(self, node: Node) -> bool | None:
        """Follow a statement; its status, None if only a run would tell."""
        method = getattr(self, f"_{node.type}", None)
        if method is not None:
            return method(node)  # type: ignore[no-any-return]
        status: bool | None = True
        for child in node.named_children:
            if child.type != "comment":
                status = self.run(child)
        return status

    def _probe(self, node: Node) -> bool:
        """The status of a condition; what is unknown counts as failed."""
        before, self.probing = self.probing, True
        status = self.run(node)
        self.probing = before
        if status is None:
            self.note(f"line {line_of(node)}: `{_short(node)}` is not known without a run; it counts as false")
        return bool(status)

    def _variable_assignment(self, node: Node) -> bool:
        name, *rest = node.named_children
        words: list[Word] = []
        for child in rest:
            if child.type == "array":
                words = [
                    word for item in child.named_children if item.type != "comment" for word in expand(item, self.scope)
                ]
            else:
                words = [value(child, self.scope)._replace(line=line_of(child))]
        if name.type != "variable_name":  # an element of an array
            self.note(f"line {line_of(node)}: `{_short(node)}` is not read")
            return True
        if any(child.type == "+=" for child in node.children):
            old = self.scope.variables.get(source(name), [])
            array = any(child.type == "array" for child in rest)
            words = [*old, *words] if array else [(old or [Word()])[0] + (words or [Word()])[0]]
        self.scope.variables[source(name)] = words if rest else [Word()]
        return True

    def _function_definition(self, node: Node) -> bool:
        self.functions[source(node.named_children[0])] = node.named_children[-1]
        return True

    def _command(self, node: Node) -> bool | None:
        words: list[Word] = []
        for child in node.named_children:
            if child.type == "command_name":
                words += expand(child.named_children[0], self.scope)
            elif child.type == "variable_assignment":
                self.run(child)
            elif not child.type.endswith("redirect"):
                words += expand(child, self.scope)
        return self._started(words, node) if words else True

    def _started(self, words: list[Word], node: Node) -> bool | None:
        name = words[0].text
        if name == "exit":
            raise _Exit(line_of(node))
        if name == "shift":
            count = int(words[1].text) if len(words) > 1 and words[1].text.isdigit() else 1
            self.scope.positional = self.scope.positional[count:]
            return True
        if name in ("echo", "printf"):
            self.printed += words[-1:]
        if name in _QUIET:
            return True
        if name in ("false", "return"):
            return name == "return"
        if name in self.functions:
            before, self.scope.positional = self.scope.positional, words[1:]
            status = self.run(self.functions[name])
            self.scope.positional = before
            return status
        if self.probing:
            return None
        self.script.commands.append([word._replace(line=word.line or line_of(node)) for word in words])
        return True

    def _redirected_statement(self, node: Node) -> bool | None:
        document = next((child for child in node.named_children if child.type == "heredoc_redirect"), None)
        first = node.named_children[0]
        if document is not None and first.type == "command" and source(first).startswith("read"):
            body = next((c for c in document.named_children if c.type == "heredoc_body"), None)
            text = Word() if body is None else value(body, self.scope)
            self.scope.variables[source(first.named_children[-1])] = [text]
            return True
        return self.run(first)

    def _declaration_command(self, node: Node) -> bool:
        for child in node.named_children:
            if child.type == "variable_assignment":
                self.run(child)
        return True

    def _list(self, node: Node) -> bool | None:
        left, right = node.named_children[0], node.named_children[-1]
        status = self.run(left)
        if status is None:
            self.note(f"line {line_of(left)}: `{_short(left)}` was not run; it counts as failed")
        wants = any(child.type == "&&" for child in node.children)
        return self.run(right) if bool(status) == wants else status

    def _negated_command(self, node: Node) -> bool | None:
        status = self.run(node.named_children[0])
        return None if status is None else not status

    def _if_statement(self, node: Node) -> bool | None:
        branches: list[tuple[list[Node], list[Node]]] = [([], [])]
        in_body = False
        for child in node.children:
            if child.type in ("elif_clause", "else_clause"):
                parts = [c for c in child.children if c.type not in ("elif", "else", ";")]
                split = next((i for i, c in enumerate(parts) if c.type == "then"), -1)
                branches.append((parts[: max(split, 0)], parts[split + 1 :]))
            elif child.type == "then":
                in_body = True
            elif child.is_named and child.type != "comment":
                branches[0][in_body].append(child)
        for conditions, body in branches:
            if all([self._probe(condition) for condition in conditions]):
                for statement in body:
                    if statement.is_named:
                        self.run(statement)
                break
        return True

    def _case_statement(self, node: Node) -> bool:
        subject, *items = node.named_children
        word = value(subject, self.scope)
        if word.unknown:
            self.note(
                f"line {line_of(node)}: `case {_short(subject)}` depends on what is not known; no branch is taken"
            )
            return True
        for item in items:
            if item.type != "case_item":
                continue
            end = next(child.start_byte for child in item.children if child.type == ")")
            patterns = [value(c, self.scope).text for c in item.named_children if c.start_byte < end]
            if any(fnmatch.fnmatchcase(word.text, pattern) for pattern in patterns):
                for child in item.named_children:
                    if child.start_byte > end:
                        self.run(child)
                break
        return True

    def _for_statement(self, node: Node) -> bool:
        name, *items, body = node.named_children
        words = [word for item in items for word in expand(item, self.scope)]
        for word in words[:_MOST_ROUNDS]:
            self.scope.variables[source(name)] = [word]
            self.run(body)
        return True

    def _while_statement(self, node: Node) -> bool:
        self.note(f"line {line_of(node)}: `{_short(node)}` is not read")
        return True

    _c_style_for_statement = _while_statement

    def _test_command(self, node: Node) -> bool | None:
        return self._test(node.named_children[0]) if node.named_children else False

    def _test(self, node: Node) -> bool | None:
        """The truth of an expression in brackets."""
        if node.type == "parenthesized_expression":
            return self._test(node.named_children[0])
        if node.type == "unary_expression":
            sign, operand = source(node.children[0]), node.named_children[-1]
            if sign == "!":
                inner = self._test(operand)
                return None if inner is None else not inner
            word = value(operand, self.scope)
            if sign not in ("-z", "-n") or any(UNSET not in why and "depends" not in why for why in word.unknown):
                return None
            return (word.text == "") == (sign == "-z")
        if node.type != "binary_expression":
            word = value(node, self.scope)
            return None if word.unknown else bool(word.text)
        left, sign, right = node.children[0], source(node.children[1]), node.children[-1]
        if sign in ("&&", "||", "-a", "-o"):
            one, other = self._test(left), self._test(right)
            decided = sign in ("||", "-o")
            return decided if decided in (one, other) else None if None in (one, other) else not decided
        return self._compared(value(left, self.scope), sign, value(right, self.scope))

    def _compared(self, left: Word, sign: str, right: Word) -> bool | None:
        if sign in ("=", "==", "!="):
            if any(UNSET not in why and "depends" not in why for why in left.unknown + right.unknown):
                return None
            return fnmatch.fnmatchcase(left.text, right.text) == (sign != "!=")
        numbers = {"-lt": int.__lt__, "-le": int.__le__, "-gt": int.__gt__, "-ge": int.__ge__, "-eq": int.__eq__}
        try:
            a, b = int(left.text), int(right.text)
        except ValueError:
            return None
        return a != b if sign == "-ne" else numbers[sign](a, b) if sign in numbers else None

    def _output(self, node: Node) -> Word:
        """What a substitution prints, if ``echo`` alone decides; else unknown."""
        if any(child.type == "pipeline" for child in node.named_children):
            return unknown(node, "was not run")
        before, self.printed, probing, self.probing = self.printed, [], self.probing, True
        for child in node.named_children:
            self.run(child)
        printed, self.printed, self.probing = self.printed, before, probing
        return printed[-1] if len(printed) == 1 else unknown(node, "was not run")


def _short(node: Node) -> str:
    text = " ".join(source(node).split())
    return text if len(text) <= 60 else f"{text[:59]}…"
