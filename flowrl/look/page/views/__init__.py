"""The views of the page, each as plain JSON."""
