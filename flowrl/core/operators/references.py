"""References: how a file names a user's function, how it is found again, and how another version of it is noticed.

A reference is ``"package.module:name"`` or ``"path/to/file.py:name"``; `name` may be dotted (``Class.method``). A
function that no other process could find by a reference (a lambda, a closure, a `functools.partial`) has none.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import textwrap
import tokenize
import traceback
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, cast

import xxhash

from flowrl.errors import FlowrlError, ParameterError, offer, type_of

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


def reference(fn: Callable[..., Any]) -> str | None:
    """The reference of `fn`, or None where it has none.

    A function of the script that runs now is named by its file (relative to the working directory where it lies below
    it), and so is one of a module that was loaded from a path.
    """
    name, module_name = getattr(fn, "__qualname__", None), getattr(fn, "__module__", None)
    module = sys.modules.get(module_name) if isinstance(module_name, str) else None
    if module is None or not isinstance(name, str) or _attribute(module, name) is not fn:
        return None
    if module_name == "__main__":
        if module.__spec__ is not None:  # python -m package.module
            return f"{module.__spec__.name}:{name}"
    elif _is_found_by_name(module):
        return f"{module_name}:{name}"
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py") or not os.path.isfile(file):
        return None
    relative = os.path.relpath(file)
    return f"{os.path.abspath(file) if relative.startswith(os.pardir) else relative}:{name}"


def resolve(ref: str) -> Callable[..., Any]:
    """The function that `ref` names; see `load_object`.

    Raises:
        ParameterError: as for `load_object`; or what it names is not callable.
    """
    fn = load_object(ref)
    if not callable(fn):
        raise ParameterError(
            f"{ref!r} does not name a function: {parse_reference(ref)[0]} has {type_of(fn)} under that name; "
            f"expected a function."
        )
    return cast("Callable[..., Any]", fn)


def load_object(ref: str) -> Any:
    """What `ref` names; a file is run as a module of its own, once for each state of its content.

    Raises:
        ParameterError: there is no such module, file or name, or it raises as it is imported, named by file and line.
        FlowrlError: any that the file or module itself raises as it is imported.
    """
    source, name = parse_reference(ref)
    file = source_file(ref)
    try:
        module = _load_file(cast(str, file)) if source.endswith(".py") else importlib.import_module(source)
    except FlowrlError:
        raise
    except (Exception, SystemExit) as error:
        raise ParameterError(f"{ref!r} cannot be used: {_what_failed(error, file)}.") from error
    try:
        return functools.reduce(getattr, name.split("."), cast(Any, module))
    except AttributeError as error:
        raise ParameterError(
            f"{ref!r} names nothing: {source} does not define {name!r}; {offer(name, _defined(module), 'it defines')}"
        ) from error


def _what_failed(error: BaseException, file: str | None) -> str:
    """What went wrong while `file` was imported, and where: its own last line that ran, or that does not compile."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno} does not compile ({error.msg})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames
    where = f"{own[-1].filename}:{own[-1].lineno}"
    if isinstance(error, SystemExit):
        return f"{where} ends the process as the file is imported; move that below `if __name__ == '__main__':`"
    return f"{where} raises {type(error).__name__} as the file is imported: {str(error).rstrip('.')}"


def _defined(module: ModuleType) -> list[str]:
    """The public names that come from `module` itself, as far as that can be told."""

    def is_own(value: Any) -> bool:
        if inspect.ismodule(value) or value is annotations:  # which `from __future__ import annotations` leaves
            return False
        wrapped = inspect.unwrap(value)
        return not isinstance(wrapped, type | FunctionType) or wrapped.__module__ == module.__name__

    return [name for name, value in vars(module).items() if not name.startswith("_") and is_own(value)]


def check(ref: str, classes: bool = False) -> None:
    """Refuse a reference to something that is not there or is no function, without running the module or file it names.

    Args:
        ref: the reference.
        classes: whether a class will do as well.

    Raises:
        ParameterError: there is no such module or file, it does not compile, nothing in it defines the name, or the
            name is plainly that of a class or of a literal.
    """
    name = parse_reference(ref)[1]
    file = source_file(ref)
    if file is None or not file.endswith(".py"):
        return  # no source to look at; `resolve` will find out
    _, tree = _read(ref, file)
    bound = _bound_names(tree)
    open_ended = "*" in bound or "__getattr__" in bound
    if name.split(".")[0] not in bound and not open_ended:
        functions = [node.name for node in tree.body if isinstance(node, Definition)]
        raise ParameterError(
            f"{ref!r} does not name a function: {file} does not define {name!r}; {offer(name, functions, 'it defines')}"
        )
    what = _plainly(_only_binding(tree, name))
    if what is not None and not (classes and what == "a class"):
        raise ParameterError(
            f"{ref!r} does not name a function: {file} has {what} under that name; expected a function, or a method "
            f"as 'path/to/file.py:Class.method'."
        )


def _read(ref: str, file: str) -> tuple[str, ast.Module]:
    """The text of the file that `ref` names, and its syntax tree.

    Raises:
        ParameterError: it cannot be read, or does not compile.
    """
    try:
        with tokenize.open(file) as stream:  # in the encoding that its first lines name
            text = stream.read()
        tree = ast.parse(text, file)
        compile(tree, file, "exec", dont_inherit=True)  # which refuses more, such as a `return` outside a function
        return text, tree
    except SyntaxError as error:
        where = f"{file}:{error.lineno}" if error.lineno else file
        raise ParameterError(f"{ref!r} cannot be used: {where} does not compile ({error.msg}).") from error
    except (OSError, ValueError, RecursionError, MemoryError) as error:  # bytes of another encoding; endless brackets
        raise ParameterError(f"{ref!r} cannot be used: {file} is no Python that can be read ({error}).") from error


def _plainly(binding: ast.stmt | None) -> str | None:
    """What a name is that this statement binds, where that is plainly no function."""
    if isinstance(binding, ast.ClassDef) and not binding.decorator_list:
        return "a class"
    if isinstance(binding, ast.Assign | ast.AnnAssign) and binding.value is not None:
        with contextlib.suppress(ValueError, TypeError):  # an expression that may well be a function
            return f"a literal ({type(ast.literal_eval(binding.value)).__name__})"
    return None


def _definition(ref: str) -> tuple[str, Function] | None:
    """The source of a file, and the one undecorated ``def`` in it that gives a name its meaning, where there is one."""
    _, name = parse_reference(ref)
    file = source_file(ref)
    if file is None or not file.endswith(".py"):
        return None
    text, tree = _read(ref, file)
    binding = _only_binding(tree, name)
    return (text, binding) if isinstance(binding, Function) and not binding.decorator_list else None


def _only_binding(tree: ast.Module, name: str) -> ast.stmt | None:
    """The top-level statement that binds a name, where nothing else does."""
    found = [statement for statement in tree.body for bound in _bound_names(statement) if bound == name]
    return found[0] if len(found) == 1 else None


def _bound_names(tree: ast.AST) -> list[str]:
    """The names that a module or statement binds or deletes, once for each time; ``*`` for a star import."""
    names: list[str] = []
    waiting: list[Any] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.AnnAssign) and node.value is None:
            continue  # binds nothing
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.append(node.id)
        elif isinstance(node, ast.alias):
            names.append(node.asname or node.name.partition(".")[0])
        elif isinstance(own := getattr(node, "name", getattr(node, "rest", None)), str):
            names.append(own)  # of a function, a class, an exception or a pattern
        if not isinstance(node, Definition | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
    return names


def parse_reference(ref: str) -> tuple[str, str]:
    """Module or file, and name.

    Raises:
        ParameterError: `ref` is not of the form of a reference.
    """
    if ref.endswith(".py"):
        raise ParameterError(f"{ref!r} is a file; expected a name in it, too, such as '{ref}:graph'.")
    source, _, name = ref.rpartition(":")
    well_formed = source.endswith(".py") or all(part.isidentifier() for part in source.split("."))
    if not source or not well_formed or not all(part.isidentifier() for part in name.split(".")):
        raise ParameterError(f"{ref!r} names nothing; expected 'package.module:name' or 'path/to/file.py:name'.")
    return source, name


def source_file(ref: str) -> str | None:
    """The absolute path of the file that defines what `ref` names; None for a module without one (built in, zipped).

    Raises:
        ParameterError: there is no such module or file.
    """
    source, _ = parse_reference(ref)
    if source.endswith(".py"):
        if not os.path.isfile(source):
            raise ParameterError(f"{ref!r} names nothing: there is no file {os.path.abspath(source)!r}.")
        return os.path.abspath(source)
    try:
        spec = importlib.util.find_spec(source)
    except (ImportError, ValueError) as error:
        raise ParameterError(
            f"{ref!r} names nothing: finding {source} raised {type(error).__name__}: {error}."
        ) from error
    if spec is None:
        raise ParameterError(
            f"{ref!r} names nothing: no module {source!r} is on sys.path; install it, or name its file: "
            f"'path/to/file.py:{parse_reference(ref)[1]}'."
        )
    return os.path.abspath(spec.origin) if spec.origin is not None and os.path.isfile(spec.origin) else None


def has_main_guard(file: str) -> bool:
    """Whether a script has ``if __name__ == "__main__":`` at its top level: importing it does not run its work then."""
    with open(file, "rb") as stream:
        tree = ast.parse(stream.read(), file)
    tests = [node.test for node in tree.body if isinstance(node, ast.If)]
    return any(isinstance(n, ast.Name) and n.id == "__name__" for test in tests for n in ast.walk(test))


def runs_again(ref: str) -> bool:
    """Whether to import what `ref` names is to run the script again that runs now, as it guards nothing."""
    file, script = source_file(ref), getattr(sys.modules["__main__"], "__file__", None)
    return file is not None and script is not None and os.path.abspath(script) == file and not has_main_guard(file)


def source_hash(fn: Callable[..., Any]) -> str:
    """xxh3-128 over what `fn` is: its source, and the plain values and functions that it closes over.

    A lambda (whose source is a line that it may share) and a function without source are hashed by their bytecode, so
    their hash is for one version of Python. What is called by global names is not followed.
    """
    digest = xxhash.xxh3_128()
    for part in _parts(fn, set()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def named_source_hash(ref: str) -> str:
    """The `source_hash` of the function that `ref` names, without importing it where its source says all there is."""
    if (found := _definition(ref)) is not None:
        text, node = found
        own = "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])
        return xxhash.xxh3_128_hexdigest(own.encode() + b"\0")
    return source_hash(resolve(ref))


def _parts(fn: Any, seen: set[int]) -> list[str]:
    """The texts that make up the identity of `fn`; `seen` ends recursion through closures."""
    if id(fn) in seen:
        return []
    seen.add(id(fn))
    if isinstance(fn, functools.partial):
        bound = [*fn.args, *(x for item in sorted(fn.keywords.items()) for x in item)]
        return ["partial", *_parts(fn.func, seen), *(text for value in bound for text in _value_parts(value, seen))]
    if inspect.ismethod(fn):
        return [*_parts(fn.__func__, seen), *_value_parts(fn.__self__, seen)]
    code = getattr(fn, "__code__", None)
    if code is None:
        target = fn if isinstance(fn, type) or inspect.isroutine(fn) else type(fn)
        try:
            return [textwrap.dedent(inspect.getsource(target))]
        except (OSError, TypeError):
            return [f"{target.__module__}.{target.__qualname__}"]  # compiled code
    held = [cell.cell_contents for cell in fn.__closure__ or () if cell != CellType()]
    try:
        if fn.__name__ == "<lambda>":
            raise OSError("a lambda's source is the whole line")
        own = [textwrap.dedent(inspect.getsource(code))]
    except (OSError, TypeError):
        own = _code_parts(code)
        held += [*(fn.__defaults__ or ()), *(x for item in sorted((fn.__kwdefaults__ or {}).items()) for x in item)]
    return [*own, *(text for value in held for text in _value_parts(value, seen))]


def _value_parts(value: Any, seen: set[int]) -> list[str]:
    if isinstance(value, tuple | list):
        return [type(value).__name__, str(len(value)), *(text for item in value for text in _value_parts(item, seen))]
    if value is None or isinstance(value, str | bytes | int | float | bool):
        return [repr(value)]
    return _parts(value, seen) if callable(value) else [type(value).__qualname__]


def _code_parts(code: CodeType) -> list[str]:
    constants = [_code_parts(c) if isinstance(c, CodeType) else [repr(c)] for c in code.co_consts]
    return [
        code.co_code.hex(),
        repr(code.co_names),
        repr(code.co_varnames),
        *(text for part in constants for text in part),
    ]


def _attribute(module: ModuleType, name: str) -> Any:
    return functools.reduce(lambda owner, part: getattr(owner, part, None), name.split("."), cast(Any, module))


def _is_found_by_name(module: ModuleType) -> bool:
    """Whether importing the module's name afresh would give the file that it was loaded from."""
    parent = sys.modules.get(module.__name__.rpartition(".")[0])
    for finder in sys.meta_path:
        spec = finder.find_spec(module.__name__, getattr(parent, "__path__", None))
        if spec is not None:
            file = getattr(module, "__file__", None)
            return file is None or (spec.origin is not None and os.path.abspath(spec.origin) == os.path.abspath(file))
    return False


def _load_file(file: str) -> ModuleType:
    main = sys.modules["__main__"]
    if os.path.abspath(getattr(main, "__file__", None) or "") == file:
        return main  # running the script a second time would run its work a second time
    with open(file, "rb") as stream:
        content = stream.read()
    stem = os.path.splitext(os.path.basename(file))[0]
    name = f"{stem}_{xxhash.xxh3_64_hexdigest(file.encode() + content)}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and the like look their module up while it is being run
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
