"""What a plan says beside what others have published and measured."""
