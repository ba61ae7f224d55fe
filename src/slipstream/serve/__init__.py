"""An OpenAI-compatible server over one engine (`pip install 'slipstream-lm[serve]'`)."""
