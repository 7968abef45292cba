"""Keywords that ``fusedseg.convert`` and ``fusedseg.recompute`` refuse, because they are options of the backend."""


def refuse(op: str, **options: object) -> None:
    """Raises TypeError, with the line to write instead, if an option of the backend is not None."""
    given = {name: value for name, value in options.items() if value is not None}
    if given:
        # Such code runs on the kernels of eager mode, and needs no C++ compiler.
        written = {"codegen": "aten", **given}
        raise TypeError(
            f"{op}: {' and '.join(given)} must be given to the compiler backend; write torch.compile(model, "
            f'backend="fusedseg", options={written}) for the stock model'.replace("'", '"')
        )
