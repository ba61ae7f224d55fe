"""What speculation costs and gains: step times, acceptance, speed-up, and rooflines. No torch, no models."""
