"""Calls of the kernels as XLA makes them, by its binary interface."""

import ctypes

DATA_TYPES = {"int32": 4, "float16": 10, "float32": 11, "float64": 12, "complex64": 15, "complex128": 18}
EXECUTE, INVALID_ARGUMENT = 3, 3
Pointer, Size, Integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
HEAD = [("size", Size), ("extensions", Pointer)]


def structure(name, fields):
    return type(name, (ctypes.Structure,), {"_fields_": fields})


Version = structure("Version", [*HEAD, ("major", Integer), ("minor", Integer)])
Metadata = structure("Metadata", [("size", Size), ("version", Version), ("traits", ctypes.c_uint32)])
Extension = structure(
    "Extension", [("size", Size), ("type", Integer), ("next", Pointer), ("metadata", ctypes.POINTER(Metadata))]
)
ErrorRequest = structure("ErrorRequest", [*HEAD, ("message", ctypes.c_char_p), ("code", Integer)])
CreateError = ctypes.CFUNCTYPE(Pointer, ctypes.POINTER(ErrorRequest))
Api = structure("Api", [*HEAD, ("version", Version), ("internal", Pointer), ("create_error", CreateError)])
Buffer = structure(
    "Buffer",
    [*HEAD, ("dtype", Integer), ("data", Pointer), ("rank", ctypes.c_int64), ("dims", ctypes.POINTER(ctypes.c_int64))],
)
Buffers = structure("Buffers", [*HEAD, ("count", ctypes.c_int64), ("types", Pointer), ("buffers", Pointer)])
Text = structure("Text", [("start", ctypes.c_char_p), ("length", Size)])
Scalar = structure("Scalar", [("dtype", Integer), ("value", Pointer)])
Attributes = structure(
    "Attributes", [*HEAD, ("count", ctypes.c_int64), ("types", Pointer), ("names", Pointer), ("values", Pointer)]
)
Call = structure(
    "Call",
    [
        *HEAD,
        ("api", ctypes.POINTER(Api)),
        ("context", Pointer),
        ("stage", Integer),
        ("arguments", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
        ("future", Pointer),
    ],
)


class Caller:
    """One call; keeps alive what it points to."""

    def __init__(self):
        self.kept = []
        self.errors = []

    def keep(self, thing):
        self.kept.append(thing)
        return thing

    def pointers(self, things):
        addresses = [ctypes.addressof(self.keep(thing)) for thing in things]
        return ctypes.addressof(self.keep((Pointer * max(1, len(things)))(*addresses)))

    def buffers(self, arrays):
        described = []
        for array in arrays:
            dims = self.keep((ctypes.c_int64 * max(1, array.ndim))(*array.shape))
            dtype = DATA_TYPES[array.dtype.name]
            described.append(Buffer(dtype=dtype, data=array.ctypes.data, rank=array.ndim, dims=dims))
        return Buffers(count=len(arrays), buffers=self.pointers(described))

    def attributes(self, named):
        values = []
        for value in named.values():
            of_type = ctypes.c_int64 if isinstance(value, int) else ctypes.c_double
            held = self.keep(of_type(value))
            values.append(Scalar(dtype=5 if isinstance(value, int) else 12, value=ctypes.addressof(held)))
        names = [Text(start=name.encode(), length=len(name)) for name in named]
        types = self.keep((Integer * len(named))(*[3] * len(named)))
        return Attributes(
            count=len(named),
            types=ctypes.addressof(types),
            names=self.pointers(names),
            values=self.pointers(values),
        )

    def created(self, request):
        self.errors.append((request.contents.code, request.contents.message.decode()))
        return 1

    def call(self, capsule, arrays, results, **attributes):
        api = self.keep(Api(create_error=self.keep(CreateError(self.created))))
        call = Call(
            api=ctypes.pointer(api),
            stage=EXECUTE,
            arguments=self.buffers(arrays),
            results=self.buffers(results),
            attributes=self.attributes(attributes),
        )
        return function_of(capsule)(ctypes.byref(call))


def function_of(capsule):
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = Pointer, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.CFUNCTYPE(Pointer, ctypes.POINTER(Call))(pointer(capsule, b"xla._CUSTOM_CALL_TARGET"))
