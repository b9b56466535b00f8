"""Search for compression plans by measuring them, and the fit of the predictor."""
