"""New weights for a model that serves: tensors that are sent or read from files, until they go live."""
