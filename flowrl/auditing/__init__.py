"""The audit: what does a graph estimate?"""
