"""The mathematics of selection: features and matrices in, indices out; no model is known here."""
