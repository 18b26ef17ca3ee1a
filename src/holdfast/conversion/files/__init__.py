"""Safe readers of the files that models come in: zips, pickles, tar archives, safetensors. Nothing is executed."""
