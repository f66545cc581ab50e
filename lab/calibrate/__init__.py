"""`gateway calibrate`: makes a calibration of closed loops that `gateway replay --live` measured."""
