"""The inspector: a page in the browser that shows what the selector saw. The server of `stacktok view`."""
