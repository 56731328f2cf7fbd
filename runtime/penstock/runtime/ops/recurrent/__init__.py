"""The operations of recurrent layers in XLA, which read and write state by slot."""
