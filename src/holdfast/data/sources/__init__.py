"""Where documents come from. A source cuts its files into stretches that workers read alone, and reads them."""
