"""What all rooms use, without heavy libraries: records, errors, seeds, checksums, turns on the device."""
