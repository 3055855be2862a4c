"""The reference implementation, which is the specification that others are tested against: dense and in float32."""
