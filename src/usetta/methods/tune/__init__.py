"""What may change at test time, image by image. Everything starts afresh with the next image."""
