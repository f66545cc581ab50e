"""`gateway calibrate`: makes a calibration from closed loops that `gateway replay --live` measured."""
