"""Pure formulas; one function a quantity."""
