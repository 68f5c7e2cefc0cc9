"""References: names of users' functions in files, their resolution, and the hash of their source.

A reference is ``"package.module:name"`` or ``"path/to/file.py:name"``; `name` may be dotted (``Class.method``). A
function that other processes cannot import (a lambda, a closure, a `functools.partial`) has no reference.
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
    """The reference of `fn`, or None.

    Functions of the running script, and of modules that were loaded from a path, are named by file; the path is
    relative for files in the working directory.
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
    """The function that `ref` names; see `load_object`."""
    fn = load_object(ref)
    if not callable(fn):
        raise ParameterError(
            f"{ref!r} does not name a function: {parse_reference(ref)[0]} has {type_of(fn)} under that name. Name a "
            f"function.",
            code="reference.not-a-function",
            reference=ref,
            found=type_of(fn),
        )
    return cast("Callable[..., Any]", fn)


def load_object(ref: str) -> Any:
    """The object that `ref` names; a file is imported as a module, once for each version of its content."""
    source, name = parse_reference(ref)
    file = source_file(ref)
    try:
        module = _load_file(cast(str, file)) if source.endswith(".py") else importlib.import_module(source)
    except FlowrlError:
        raise
    except (Exception, SystemExit) as error:
        path, line, reason = _import_failure(error, file)
        raise _broken(ref, path, line, reason) from error
    try:
        return functools.reduce(getattr, name.split("."), cast(Any, module))
    except AttributeError as error:
        known = _defined(module)
        raise ParameterError(
            f"{ref!r} names nothing: {source} does not define {name!r}; {offer(name, known, 'it defines')}",
            code="reference.undefined-name",
            reference=ref,
            name=name,
            known=known,
        ) from error


def imported(ref: str) -> Any | None:
    """The object that `ref` names, if a module that this program has imported defines it; else None. Runs no code.

    The standard library is left out: a file that may choose among its functions chooses `os.system`.
    """
    source, name = parse_reference(ref)
    if source.endswith(".py"):
        file = os.path.abspath(source)
        modules = [module for module in sys.modules.values() if _file_of(module) == file]
    else:
        modules = [sys.modules[source]] if source in sys.modules else []
    first, *rest = name.split(".")
    for module in reversed(modules):  # the newest version of a file
        found = functools.reduce(lambda owner, part: getattr(owner, part, None), rest, vars(module).get(first))
        top = module.__name__.partition(".")[0]
        if getattr(found, "__module__", None) == module.__name__ and top not in sys.stdlib_module_names:
            return found
    return None


def _file_of(module: ModuleType) -> str | None:
    """The file of an imported module; a lazy one stays so."""
    file = vars(module).get("__file__")
    return os.path.abspath(file) if isinstance(file, str) else None


def _broken(ref: str, path: str | None, line: int | None, reason: str) -> ParameterError:
    where = f"{path}:{line}" if line else path
    return ParameterError(
        f"Cannot import {ref!r}: {where} {reason}.",
        code="reference.broken-file",
        reference=ref,
        path=path,
        line=line,
        reason=reason,
    )


def _import_failure(error: BaseException, file: str | None) -> tuple[str | None, int | None, str]:
    """Path and line of `file` where its import failed, and the reason."""
    if isinstance(error, SyntaxError):
        return error.filename, error.lineno, f"does not compile ({error.msg})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames
    reason = f"raises {type(error).__name__} during import: {str(error).rstrip('.')}"
    if isinstance(error, SystemExit):
        reason = "exits during import. Move the call below `if __name__ == '__main__':`"
    return own[-1].filename, own[-1].lineno, reason


def _defined(module: ModuleType) -> list[str]:
    """The public names that `module` itself defines, as far as that is known."""

    def is_own(value: Any) -> bool:
        if inspect.ismodule(value) or value is annotations:  # which `from __future__ import annotations` leaves
            return False
        wrapped = inspect.unwrap(value)
        return not isinstance(wrapped, type | FunctionType) or wrapped.__module__ == module.__name__

    return [name for name, value in vars(module).items() if not name.startswith("_") and is_own(value)]


def check(ref: str, classes: bool = False) -> None:
    """Check a reference against the source, without running the module or file.

    An error is a missing module or file, source that does not compile, a name that is not defined, or one that is
    a literal or, unless `classes`, a class.
    """
    name = parse_reference(ref)[1]
    file = source_file(ref)
    if file is None or not file.endswith(".py"):
        return  # without source, `resolve` checks
    _, tree = _read(ref, file)
    bound = _bound_names(tree)
    open_ended = "*" in bound or "__getattr__" in bound
    if name.split(".")[0] not in bound and not open_ended:
        functions = [node.name for node in tree.body if isinstance(node, Definition)]
        raise ParameterError(
            f"{ref!r} does not name a function: {file} does not define {name!r}; "
            f"{offer(name, functions, 'it defines')}",
            code="reference.undefined-name",
            reference=ref,
            name=name,
            known=functions,
        )
    what = _not_a_function(_only_binding(tree, name))
    if what is not None and not (classes and what == "a class"):
        raise ParameterError(
            f"{ref!r} does not name a function: {file} has {what} under that name. Name a function, or a method as "
            f"'path/to/file.py:Class.method'.",
            code="reference.not-a-function",
            reference=ref,
            found=what,
        )


def _read(ref: str, file: str) -> tuple[str, ast.Module]:
    """The text of the file that `ref` names, and its syntax tree."""
    try:
        with tokenize.open(file) as stream:  # in the encoding that its first lines name
            text = stream.read()
        tree = ast.parse(text, file)
        compile(tree, file, "exec", dont_inherit=True)  # finds more errors, such as a `return` outside a function
        return text, tree
    except SyntaxError as error:
        raise _broken(ref, file, error.lineno, f"does not compile ({error.msg})") from error
    except (OSError, ValueError, RecursionError, MemoryError) as error:  # another encoding; endless brackets
        raise _broken(ref, file, None, f"cannot be read as Python ({error})") from error


def _not_a_function(binding: ast.stmt | None) -> str | None:
    """The kind of object that this statement binds to a name, if it is certainly not a function."""
    if isinstance(binding, ast.ClassDef) and not binding.decorator_list:
        return "a class"
    if isinstance(binding, ast.Assign | ast.AnnAssign) and binding.value is not None:
        with contextlib.suppress(ValueError, TypeError):  # an expression that may be a function
            return f"a literal ({type(ast.literal_eval(binding.value)).__name__})"
    return None


def _definition(ref: str) -> tuple[str, Function] | None:
    """The source of a file, and the undecorated ``def`` in it that is the only binding of the name, if any."""
    _, name = parse_reference(ref)
    file = source_file(ref)
    if file is None or not file.endswith(".py"):
        return None
    text, tree = _read(ref, file)
    binding = _only_binding(tree, name)
    return (text, binding) if isinstance(binding, Function) and not binding.decorator_list else None


def _only_binding(tree: ast.Module, name: str) -> ast.stmt | None:
    """The top-level statement that binds a name, if it is the only one."""
    found = [statement for statement in tree.body for bound in _bound_names(statement) if bound == name]
    return found[0] if len(found) == 1 else None


def _bound_names(tree: ast.AST) -> list[str]:
    """The names that a module or statement binds or deletes, once per binding; ``*`` for a star import."""
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
    """Module or file, and name, of a reference."""
    if ref.endswith(".py"):
        raise ParameterError(
            f"{ref!r} names a file but no object in it. Add the name, such as '{ref}:graph' or '{ref}:training'.",
            code="reference.format",
            reference=ref,
        )
    source, _, name = ref.rpartition(":")
    well_formed = source.endswith(".py") or all(part.isidentifier() for part in source.split("."))
    if not source or not well_formed or not all(part.isidentifier() for part in name.split(".")):
        raise ParameterError(
            f"Invalid reference {ref!r}. Write 'package.module:name' or 'path/to/file.py:name'.",
            code="reference.format",
            reference=ref,
        )
    return source, name


def source_file(ref: str) -> str | None:
    """The absolute path of the file that defines what `ref` names; None for a module without one (built in, zipped)."""
    source, name = parse_reference(ref)
    if source.endswith(".py"):
        path = os.path.abspath(source)
        if not os.path.isfile(source):
            raise ParameterError(
                f"{ref!r} names nothing: the file {path!r} does not exist. Correct the path.",
                code="reference.missing-source",
                reference=ref,
                path=path,
            )
        return path
    try:
        spec, reason = importlib.util.find_spec(source), f"no module {source!r} is on sys.path"
    except (ImportError, ValueError) as error:
        spec, reason = None, f"finding {source} raised {type(error).__name__}: {error}"
    if spec is None:
        raise ParameterError(
            f"{ref!r} names nothing: {reason}. Install the module, or name its file: 'path/to/file.py:{name}'.",
            code="reference.missing-source",
            reference=ref,
            module=source,
        )
    return os.path.abspath(spec.origin) if spec.origin is not None and os.path.isfile(spec.origin) else None


def has_main_guard(file: str) -> bool:
    """Whether a script has ``if __name__ == "__main__":`` at its top level, so that importing it does not run it."""
    with open(file, "rb") as stream:
        tree = ast.parse(stream.read(), file)
    tests = [node.test for node in tree.body if isinstance(node, ast.If)]
    return any(isinstance(n, ast.Name) and n.id == "__name__" for test in tests for n in ast.walk(test))


def runs_again(ref: str) -> bool:
    """Whether importing what `ref` names would run the current script again, since it has no main guard."""
    file, script = source_file(ref), getattr(sys.modules["__main__"], "__file__", None)
    return file is not None and script is not None and os.path.abspath(script) == file and not has_main_guard(file)


def source_hash(fn: Callable[..., Any]) -> str:
    """xxh3-128 of the source of `fn`, and of the plain values and functions in its closure.

    A lambda (which may share its line) and a function without source are hashed by their bytecode, so their hash
    depends on the version of Python. Calls of global names are not followed.
    """
    digest = xxhash.xxh3_128()
    for part in _parts(fn, set()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def named_source_hash(ref: str) -> str:
    """The `source_hash` of the function that `ref` names, without importing it if its source suffices."""
    if (found := _definition(ref)) is not None:
        text, node = found
        own = "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])
        return xxhash.xxh3_128_hexdigest(own.encode() + b"\0")
    return source_hash(resolve(ref))


def _parts(fn: Any, seen: set[int]) -> list[str]:
    """The texts that identify `fn`; `seen` ends recursion through closures."""
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
    values = [cell.cell_contents for cell in fn.__closure__ or () if cell != CellType()]
    try:
        if fn.__name__ == "<lambda>":
            raise OSError("a lambda's source is the whole line")
        own = [textwrap.dedent(inspect.getsource(code))]
    except (OSError, TypeError):
        own = _code_parts(code)
        values += [*(fn.__defaults__ or ()), *(x for item in sorted((fn.__kwdefaults__ or {}).items()) for x in item)]
    return [*own, *(text for value in values for text in _value_parts(value, seen))]


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
    """Whether importing the module by its name would load the same file."""
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
        return main  # a second import would run the script again
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
    sys.modules[name] = module  # dataclasses look up their module during its import
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
