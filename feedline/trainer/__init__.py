"""The bundled MLP trainer. Imports no stage: it is given an iterator of batches."""
