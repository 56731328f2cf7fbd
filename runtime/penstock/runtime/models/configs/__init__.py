"""What parts of a model compute, as frozen values, of which `ModelConfig` is made."""
