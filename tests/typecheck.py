"""The type checker of the tests: beartype on array annotations and on what is returned.

Other arguments are left to the package, so that its own errors come first.
"""

import beartype
import jaxtyping


def check_arrays(function):
    annotations = getattr(function, "__annotations__", {})
    function.__annotations__ = {
        name: kind
        for name, kind in annotations.items()
        if name == "return" or (isinstance(kind, type) and issubclass(kind, jaxtyping.AbstractArray))
    }
    return beartype.beartype(function)
