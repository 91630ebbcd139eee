"""Sound: WAV files, log-mel rows, transcripts, subtitles."""
