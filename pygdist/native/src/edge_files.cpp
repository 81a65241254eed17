// Edges from files: reads them from text, and sorts numbers from a small range.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "pygdist_native.h"

namespace {

bool is_blank(char c) { return c == ' ' || c == '\t'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Reads one line without its end. Returns the number of its columns, with the first two in `ids`; 0 if it holds no
// edge; a negative pygdist_status if it is wrong.
int32_t parse_line(const char* at, const char* end, int64_t* ids) {
  const auto skip_blanks = [&] {
    while (at < end && is_blank(*at)) ++at;
  };
  skip_blanks();
  if (at == end || *at == '#') return 0;  // empty, or a comment
  for (int32_t column = 0;; ++column) {
    const char* const start = at;
    if (column < 2) {
      const bool negative = at < end && *at == '-';
      if (negative) ++at;
      if (at == end || !is_digit(*at)) return -PYGDIST_BAD_LINE;
      int64_t id = 0;
      for (; at < end && is_digit(*at); ++at) {
        if (__builtin_mul_overflow(id, int64_t{10}, &id) || __builtin_add_overflow(id, int64_t{*at - '0'}, &id)) {
          return -PYGDIST_BAD_LINE;
        }
      }
      ids[column] = negative ? -id : id;
    } else {
      while (at < end && !is_blank(*at) && *at != ',' && *at != '#') {
        if (*at++ == '\r') return -PYGDIST_BAD_LINE;
      }
    }
    const bool comma_next = at < end && *at == ',';
    if (at == start && !comma_next) return -PYGDIST_BAD_LINE;  // nothing after the last comma
    if (at < end && !is_blank(*at) && *at != '#' && !comma_next) return -PYGDIST_BAD_LINE;
    skip_blanks();
    if (at == end || *at == '#') return column + 1;
    if (*at == ',') {
      ++at;
      skip_blanks();
    }
  }
}

}  // namespace

extern "C" {

int32_t pygdist_parse_edges(const char* text, int64_t length, pygdist_text* state, int64_t* edge) {
  const char* const last = text + length;
  state->count = 0;
  for (const char* at = text; at < last;) {
    const char* end = static_cast<const char*>(std::memchr(at, '\n', static_cast<size_t>(last - at)));
    if (!end) end = last;
    const char* const next = end + 1;
    if (end > at && end[-1] == '\r') --end;
    ++state->line;
    int64_t* const ids = edge + 2 * state->count;
    const int32_t columns = parse_line(at, end, ids);
    if (columns) {
      if (columns < 2) return PYGDIST_BAD_LINE;
      if (!state->columns) state->columns = columns;
      if (columns != state->columns) return PYGDIST_BAD_LINE;
      for (int32_t i = 0; i < 2; ++i) {
        state->id = ids[i];
        if (ids[i] < 0 || ids[i] > state->max_id) return PYGDIST_BAD_ID;
      }
      ++state->count;
    }
    at = next;
  }
  return PYGDIST_OK;
}

int32_t pygdist_counting_sort(const int32_t* key, int64_t count, int64_t num_keys, int64_t* indptr, int32_t* order) {
  // indptr[k + 1] is first the count of key k, then the position of its next entry, and at last its end
  std::fill(indptr, indptr + num_keys + 1, 0);
  for (int64_t i = 0; i < count; ++i) ++indptr[key[i] + 1];
  int64_t total = 0;
  for (int64_t k = 1; k <= num_keys; ++k) {
    const int64_t found = indptr[k];
    indptr[k] = total;
    total += found;
  }
  for (int64_t i = 0; i < count; ++i) order[indptr[key[i] + 1]++] = static_cast<int32_t>(i);
  return PYGDIST_OK;
}

}  // extern "C"
