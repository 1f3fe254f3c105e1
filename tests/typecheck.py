"""Shapes and dtypes that annotations state are checked in tests: of each array argument, and of
whatever is returned.

Other arguments are left to the package, so that its own errors come first.
"""

import ast
import functools
import importlib.abc
import importlib.machinery
import sys
import types
import typing

import beartype
import jaxtyping


def check_arrays(function):
    """The function with its checks, which are built on its first call: most processes call few of
    the package's functions."""
    kinds = {
        name: kind
        for name, kind in function.__annotations__.items()
        if (name == "return" and is_known(kind, function)) or is_array(kind)
    }
    if not kinds:
        return function

    @functools.cache
    def checked():
        bare = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        for name in ("__kwdefaults__", "__qualname__", "__module__"):
            setattr(bare, name, getattr(function, name))
        bare.__annotations__ = kinds
        return beartype.beartype(bare)

    @functools.wraps(function)
    def call(*args, **kwargs):
        with jaxtyping.jaxtyped("context"):
            return checked()(*args, **kwargs)

    return call


def is_known(kind, function):
    """Not where nothing is returned, nor where only type checkers import the class."""
    return kind is not typing.NoReturn and not (
        isinstance(kind, str) and kind not in function.__globals__
    )


def is_array(kind):
    return isinstance(kind, type) and issubclass(kind, jaxtyping.AbstractArray)


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules by the starts of their names, to decorate their annotated functions with
    `check_arrays`."""

    def __init__(self, starts):
        self.starts = starts

    def find_spec(self, name, path=None, target=None):
        if not name.startswith(self.starts):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and is_annotated(node):
                node.decorator_list.append(decorator_at(node))
        return compile(tree, path, "exec", dont_inherit=True)


def is_annotated(node):
    return node.returns is not None or any(
        argument.annotation for argument in ast.walk(node.args) if isinstance(argument, ast.arg)
    )


def decorator_at(node):
    """On the function's own line, which is where its source is looked for."""
    decorator = ast.parse(f"__import__({__name__!r}).{check_arrays.__name__}", mode="eval").body
    for part in ast.walk(decorator):
        ast.copy_location(part, node)
    return decorator


def install(*starts):
    sys.meta_path.insert(0, Finder(starts))
