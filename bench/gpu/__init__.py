"""What a card is asked in a quarter of an hour: `make gpu-quarter`."""
