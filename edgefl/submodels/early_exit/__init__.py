"""ScaleFL: submodels that end at an early exit of the model, narrower the weaker the device."""
