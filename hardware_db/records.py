"""Frozen, slotted dataclasses whose methods are written when they are first called.

`dataclasses.dataclass` compiles six functions for each class while its module is imported. The planner has some
140 such classes, of which a question constructs a part and compares a few: compiling was a third of the process's time.
Everything else is as there: `fields`, `asdict`, `replace`, pickling, `field` and `__post_init__`.
"""

from __future__ import annotations

__all__ = ["dataclass"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    import dataclasses
    from functools import partial

    _NOT_GIVEN = object()

    def dataclass(cls=None, /, **options):
        """`dataclasses.dataclass` with its options; `frozen=True, slots=True` compiles at the first use."""
        if cls is None:
            return partial(dataclass, **options)
        deferred = options.get("frozen") and options.get("slots") and options.keys() <= _DEFERRED_OPTIONS
        if not deferred or not _OWN_METHODS.isdisjoint(vars(cls)):
            return dataclasses.dataclass(**options)(cls)
        return _defer_methods(cls, kw_only=options.get("kw_only", False), eq=options.get("eq", True))

    _DEFERRED_OPTIONS = {"frozen", "slots", "kw_only", "eq"}
    _OWN_METHODS = frozenset({"__init__", "__eq__", "__setattr__", "__delattr__", "__getstate__", "__setstate__"})

    def _defer_methods(cls, *, kw_only, eq):
        """Return the class again, with slots and with methods that put the compiled ones in their own place."""
        body = dict(vars(cls))
        hints = cls.__annotations__
        names = [name for name, hint in hints.items() if not str(hint).startswith(("ClassVar", "typing.ClassVar"))]
        declared = {name: body.pop(name) for name in names if name in body}
        inherited = {name for base in cls.__mro__[1:] for name in vars(base).get("__slots__", ())}
        body["__slots__"] = tuple(name for name in names if name not in inherited)
        body.pop("__dict__", None)
        body.pop("__weakref__", None)

        def fields(owner):
            """Those of the bases and its own, as `dataclasses` reads them; nothing is compiled for it."""
            own = type(
                cls.__name__, (), {"__module__": cls.__module__, "__annotations__": hints, "__doc__": "-", **declared}
            )
            dataclasses.dataclass(init=False, repr=False, eq=False, match_args=False, kw_only=kw_only)(own)
            bases = [getattr(base, "__dataclass_fields__", {}) for base in reversed(owner.__mro__[1:])]
            return {name: item for part in (*bases, own.__dataclass_fields__) for name, item in part.items()}

        body["__dataclass_fields__"] = _WorkedOut(fields)
        body["__dataclass_params__"] = _WorkedOut(_params)
        body["__match_args__"] = () if kw_only else _WorkedOut(_positional)
        body["__setattr__"], body["__delattr__"] = _refuse_assignment, _refuse_deletion
        body["__getstate__"], body["__setstate__"] = _state, _restore
        body.setdefault("__repr__", _representation)
        home = []
        # What has no bases is read as it is declared, which takes half the time.
        own = partial(_parameters, names, declared, kw_only) if cls.__bases__ == (object,) else _known_parameters
        body["__init__"] = _written_when_called("__init__", partial(_init, own), home)
        if eq:
            body["__eq__"] = _written_when_called("__eq__", _eq, home)
            body.setdefault("__hash__", _written_when_called("__hash__", _hash, home))
        new_class = type(cls)(cls.__name__, cls.__bases__, body)
        new_class.__qualname__ = cls.__qualname__
        home.append(new_class)
        return new_class

    class _WorkedOut:
        """A class attribute that is worked out when it is first asked for."""

        def __init__(self, of):
            self.of = of

        def __set_name__(self, owner, name):
            self.owner, self.name = owner, name

        def __get__(self, instance, owner=None):
            value = self.of(self.owner)
            setattr(self.owner, self.name, value)
            return value

    def _params(owner):
        plain = dataclasses.dataclass(frozen=True, init=False, repr=False, eq=False)(
            type(owner.__name__, (), {"__doc__": "-"})
        )
        return plain.__dataclass_params__

    def _positional(owner):
        return tuple(item.name for item in dataclasses.fields(owner) if item.init and not item.kw_only)

    def _written_when_called(name, write, home):
        def method(self, *args, **named):
            (cls,) = home
            written = write(cls)
            written.__qualname__ = f"{cls.__qualname__}.{name}"
            setattr(cls, name, written)
            return written(self, *args, **named)

        method.__name__ = name
        return method

    def _parameters(names, declared, kw_only, _):
        """Name, default, factory, whether it is a parameter, and whether by name alone, of each field."""
        missing = dataclasses.MISSING
        for name in names:
            given = declared.get(name, missing)
            if not isinstance(given, dataclasses.Field):
                yield name, given, missing, True, kw_only
            else:
                by_name = kw_only if given.kw_only is missing else given.kw_only
                yield name, given.default, given.default_factory, given.init, by_name

    def _known_parameters(cls):
        for item in dataclasses.fields(cls):
            yield item.name, item.default, item.default_factory, item.init, item.kw_only

    def _init(parameters_of, cls):
        """`__init__`, which puts each value into its slot."""
        missing = dataclasses.MISSING
        namespace = {"_not_given": _NOT_GIVEN}
        parameters, named, lines = ["self"], [], []
        for number, (name, default, factory, is_parameter, by_name) in enumerate(parameters_of(cls)):
            namespace[f"_set_{number}"] = _setter(cls, name)
            value, otherwise, factory_call = name, "", ""
            if default is not missing:
                namespace[f"_default_{number}"] = default
                otherwise = factory_call = f"_default_{number}"
            elif factory is not missing:
                namespace[f"_made_{number}"] = factory
                otherwise, factory_call = "_not_given", f"_made_{number}()"
                value = f"{factory_call} if {name} is _not_given else {name}"
            if is_parameter:
                (named if by_name else parameters).append(f"{name}={otherwise}" if otherwise else name)
            elif factory_call:
                value = factory_call
            else:
                continue
            lines.append(f"_set_{number}(self, {value})")
        if hasattr(cls, "__post_init__"):
            lines.append("self.__post_init__()")
        if named:
            parameters += ["*", *named]
        return _compile(cls, "__init__", parameters, lines or ["pass"], namespace)

    def _setter(cls, name):
        """Write past `__setattr__`: the slot's own, or object's where a base without slots declares the field."""
        slot = getattr(cls, name, None)
        return getattr(slot, "__set__", None) or (lambda record, value: object.__setattr__(record, name, value))

    def _eq(cls):
        names = [item.name for item in dataclasses.fields(cls) if item.compare]
        mine, its = ("".join(f"{of}.{name}," for name in names) for of in ("self", "other"))
        lines = [f"return ({mine}) == ({its}) if other.__class__ is self.__class__ else NotImplemented"]
        return _compile(cls, "__eq__", ["self", "other"], lines, {})

    def _hash(cls):
        hashed = [item for item in dataclasses.fields(cls) if (item.compare if item.hash is None else item.hash)]
        lines = [f"return hash(({''.join(f'self.{item.name},' for item in hashed)}))"]
        return _compile(cls, "__hash__", ["self"], lines, {})

    def _compile(cls, name, parameters, lines, namespace):
        body = "\n ".join(lines)
        names = {"__name__": cls.__module__, **namespace}
        exec(f"def {name}({', '.join(parameters)}):\n {body}", names)
        return names[name]

    def _representation(self):
        shown = (f"{item.name}={getattr(self, item.name)!r}" for item in dataclasses.fields(self) if item.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def _refuse_assignment(self, name, value):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def _refuse_deletion(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def _state(self):
        return [getattr(self, item.name) for item in dataclasses.fields(self)]

    def _restore(self, state):
        for item, value in zip(dataclasses.fields(self), state, strict=True):
            object.__setattr__(self, item.name, value)
