"""What a run tells about itself: metrics, samples, the display, the report."""
