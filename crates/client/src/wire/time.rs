//! Times in RFC 3339 format, in UTC: readable for people and for every language's library.

const DAY_MS: u64 = 24 * 3600 * 1000;

/// Milliseconds since 1970 as `2026-01-02T03:04:05.678Z`.
pub fn to_rfc3339(ms: u64) -> String {
    let (days, in_day) = (ms / DAY_MS, ms % DAY_MS);
    let (year, month, day) = date(i64::try_from(days).unwrap_or(i64::MAX / 2));
    let (hour, minute, second) = (in_day / 3_600_000, in_day / 60_000 % 60, in_day / 1000 % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z", in_day % 1000)
}

/// Parses the format of [`to_rfc3339`], with any number of digits after the decimal point.
pub fn from_rfc3339(text: &str) -> Option<u64> {
    let number = |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?;
    let (day, time) = text.strip_suffix('Z')?.split_once('T')?;
    let mut day = day.split('-').map(number);
    let (year, month, day) = (day.next()??, day.next()??, day.next()??);
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let mut time = time.split(':').map(number);
    let (hour, minute, second): (u64, u64, u64) = (time.next()??, time.next()??, time.next()??);
    number(fraction)?;
    let ms: u64 = format!("{fraction:0<3}").get(..3)?.parse().ok()?;
    if !(1970..=9999).contains(&year)
        || !(1..=12).contains(&month)
        || !(1..=31).contains(&day)
        || (hour, minute, second) > (23, 59, 60)
    {
        return None;
    }
    Some(days(year, month, day) * DAY_MS + ((hour * 60 + minute) * 60 + second) * 1000 + ms)
}

/// Year, month and day of the civil calendar, from days since 1970. Years begin in March here, so that the leap day is
/// the last day of a year.
fn date(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

fn days(year: u64, month: u64, day: u64) -> u64 {
    let year = year - u64::from(month <= 2);
    let (era, year_of_era) = (year / 400, year % 400);
    let from_march = (month + 9) % 12;
    let day_of_year = (153 * from_march + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_round_trip() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_827_696_007, "2000-02-29T12:34:56.007Z"),
            (1_735_689_599_999, "2024-12-31T23:59:59.999Z"),
            (253_402_300_799_999, "9999-12-31T23:59:59.999Z"),
        ] {
            assert_eq!(to_rfc3339(ms), text);
            assert_eq!(from_rfc3339(text), Some(ms));
        }
        for day in 0..200_000 {
            let ms = day * DAY_MS;
            assert_eq!(from_rfc3339(&to_rfc3339(ms)), Some(ms));
        }
        assert_eq!(from_rfc3339("2000-02-29T12:34:56Z"), Some(951_827_696_000));
        assert_eq!(from_rfc3339("2000-02-29T12:34:56.0071Z"), Some(951_827_696_007));
    }

    #[test]
    fn invalid_times_are_refused() {
        let bad =
            ["", "Z", "T", "2000-02-29", "2000-02-29T12:34:56", "2000-13-01T00:00:00Z", "-1-01-01T00:00:00Z"];
        for text in
            bad.into_iter().chain(["2000-02-29T24:00:00Z", "2000-02-29T12:34:56.x7Z", "0000-00-00T0:0:0Z"])
        {
            assert_eq!(from_rfc3339(text), None, "{text}");
        }
    }
}
