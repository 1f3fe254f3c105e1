"""Checks the shapes and dtypes that annotations state: of each array argument, and of each result.

Other arguments are left to the package, so that its own errors come first. A check takes longer than
most of the functions, so each form of the arguments and the result is checked once for each function.
"""

import ast
import functools
import importlib.abc
import importlib.machinery
import sys
import typing

import beartype.door
import jax
import jaxtyping
import numpy as np


def check_arrays(function):
    """Returns the function with its checks, or the function itself if there is nothing to check."""
    kinds = {
        name: kind
        for name, kind in function.__annotations__.items()
        if (name == "return" and is_known(kind, function)) or is_array(kind)
    }
    if not kinds:
        return function
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    right_forms = set()

    def check(values):
        forms = tuple((name, form_of(value)) for name, value in values.items())
        if forms not in right_forms:
            check_values(function, values, kinds)
            right_forms.add(forms)

    @functools.wraps(function)
    def call_and_check_result(*args, **kwargs):
        result = function(*args, **kwargs)
        form = form_of(result)
        if form not in right_forms:
            check_values(function, {"return": result}, kinds)
            right_forms.add(form)
        return result

    if kinds.keys() == {"return"}:
        return call_and_check_result

    @functools.wraps(function)
    def call(*args, **kwargs):
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        values = {name: arguments[name] for name in kinds if name in arguments}
        check(values)
        result = function(*args, **kwargs)
        if "return" in kinds:
            check(values | {"return": result})
        return result

    return call


# To make the union of two classes takes as long as all else in a look at a value.
ARRAYS = (jax.Array, np.ndarray)


def form_of(value):
    """Returns the class of a value, and the shape and the dtype of each array that is in it."""
    if isinstance(value, tuple):
        return type(value), *map(form_of, value)
    if isinstance(value, ARRAYS):
        return type(value), value.shape, value.dtype
    return type(value)


def check_values(function, values, kinds):
    """Raises an error unless each value has its kind, where one letter is one size in all of them."""
    with jaxtyping.jaxtyped("context"):
        for name, value in values.items():
            kind = kinds[name]
            if isinstance(kind, str):
                kind = function.__globals__[kind]
            prefix = f"{function.__qualname__}, {name}: "
            beartype.door.die_if_unbearable(value, kind, exception_prefix=prefix)


def is_known(kind, function):
    """Returns whether something is returned whose class can be looked up, and is a value's class."""
    if kind is typing.NoReturn or typing.get_origin(kind) is typing.TypeGuard:
        return False
    # Some classes are imported by type checkers alone.
    return not isinstance(kind, str) or kind in function.__globals__


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
