// Writing to an open file, whatever the system takes at a time.
#pragma once
#include <cstdint>

// Returns the system's number for an error, or 0.
int write_fully(int file, const uint8_t* data, int64_t size, int64_t offset);
