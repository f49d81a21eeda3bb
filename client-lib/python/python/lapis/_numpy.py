"""Tensors as arrays of numpy, without a copy."""

# Types that numpy has only with ml_dtypes.
_ML_DTYPES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def as_numpy(tensor):
    """The array. It keeps the mapping from ending until it is deleted."""
    import numpy

    name = _ML_DTYPES.get(tensor.dtype)
    if name is None:
        try:
            view = memoryview(tensor)
        except BufferError as error:
            if tensor.device == "cuda":
                raise
            message = f"numpy has no elements of type {tensor.dtype}: use raw() for the bytes"
            raise TypeError(message) from error
        return numpy.asarray(view)
    try:
        import ml_dtypes
    except ImportError as error:
        raise TypeError(f"arrays of {tensor.dtype} need ml_dtypes: pip install ml_dtypes") from error
    dtype = numpy.dtype(getattr(ml_dtypes, name))
    return numpy.asarray(memoryview(tensor.raw())).view(dtype).reshape(tensor.shape)


def as_array(tensor, dtype, copy):
    """What `numpy.asarray(tensor)` calls for types that buffers don't have."""
    array = as_numpy(tensor)
    if dtype is not None and array.dtype != dtype:
        if copy is False:
            raise ValueError(f"a tensor of {tensor.dtype} can't be {dtype} without a copy")
        return array.astype(dtype)
    return array.copy() if copy else array
