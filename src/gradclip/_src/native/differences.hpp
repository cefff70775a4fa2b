// Differences of arrays, in double.
#pragma once

#include "arrays.hpp"

// Writes each array minus the array of `others` with the same index to that of `to`. On one thread.
void subtract(const Arrays& arrays, const Arrays& others, const Arrays& to);
