"""Speech recognition with Whisper: sound files, windows, timestamps and captions around the one decoding loop."""
