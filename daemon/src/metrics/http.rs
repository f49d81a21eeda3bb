//! The little of HTTP that a scrape needs: the first line of a request with no body, and whole replies. Everything
//! else is refused; nothing that a peer says makes us hold more than [`HEAD_BYTES_MAX`].

/// Longest head of a request.
pub(super) const HEAD_BYTES_MAX: usize = 8192;

/// What has been received so far.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Head<'a> {
    /// More must come.
    Partial,
    /// A request for a path, of which only the head is asked if not `body`.
    Get { path: &'a str, body: bool },
    /// Answer with this status, and end.
    Bad(Status),
}

/// Statuses that are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    BadRequest,
    NotFound,
    MethodNotAllowed,
    HeadTooLarge,
    Unavailable,
    VersionUnsupported,
}

impl Status {
    /// Number and phrase.
    pub(super) fn line(self) -> &'static str {
        match self {
            Status::Ok => "200 OK",
            Status::BadRequest => "400 Bad Request",
            Status::NotFound => "404 Not Found",
            Status::MethodNotAllowed => "405 Method Not Allowed",
            Status::HeadTooLarge => "431 Request Header Fields Too Large",
            Status::Unavailable => "503 Service Unavailable",
            Status::VersionUnsupported => "505 HTTP Version Not Supported",
        }
    }
}

/// Reads the head of a request.
pub(super) fn head(received: &[u8]) -> Head<'_> {
    let whole = received.windows(4).any(|bytes| bytes == b"\r\n\r\n");
    if !whole {
        let full = received.len() >= HEAD_BYTES_MAX;
        return if full { Head::Bad(Status::HeadTooLarge) } else { Head::Partial };
    }
    let line = received.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else { return Head::Bad(Status::BadRequest) };
    let mut words = line.split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Head::Bad(Status::BadRequest);
    };
    if !version.starts_with("HTTP/") || !target.starts_with('/') {
        return Head::Bad(Status::BadRequest);
    }
    if !version.starts_with("HTTP/1.") {
        return Head::Bad(Status::VersionUnsupported);
    }
    let path = target.split('?').next().unwrap_or_default();
    match method {
        "GET" => Head::Get { path, body: true },
        "HEAD" => Head::Get { path, body: false },
        _ => Head::Bad(Status::MethodNotAllowed),
    }
}

/// A whole reply; `body` false leaves the body out, but not its length.
pub(super) fn reply(status: Status, content_type: &str, text: &str, body: bool) -> Vec<u8> {
    let allow = if status == Status::MethodNotAllowed { "Allow: GET, HEAD\r\n" } else { "" };
    let head = format!(
        "HTTP/1.1 {}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n{allow}\
         Cache-Control: no-store\r\nConnection: close\r\n\r\n",
        status.line(),
        text.len()
    );
    let mut bytes = head.into_bytes();
    if body {
        bytes.extend_from_slice(text.as_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_read_and_what_is_none_is_refused() {
        let get = |path, body| Head::Get { path, body };
        assert_eq!(head(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), get("/metrics", true));
        assert_eq!(head(b"HEAD /healthz?x=1 HTTP/1.0\r\n\r\n"), get("/healthz", false));
        assert_eq!(head(b"GET /metrics HTTP/1.1\r\nHost: x\r\n"), Head::Partial);
        assert_eq!(head(b""), Head::Partial);
        for (bytes, status) in [
            (&b"GET /metrics\r\n\r\n"[..], Status::BadRequest),
            (b"\r\n\r\n", Status::BadRequest),
            (b"GET  /metrics HTTP/1.1\r\n\r\n", Status::BadRequest),
            (b"GET http://x/ HTTP/1.1\r\n\r\n", Status::BadRequest),
            (b"GET /\xff HTTP/1.1\r\n\r\n", Status::BadRequest),
            (b"POST /metrics HTTP/1.1\r\n\r\n", Status::MethodNotAllowed),
            (b"GET /metrics HTTP/2.0\r\n\r\n", Status::VersionUnsupported),
            (&[b'a'; HEAD_BYTES_MAX], Status::HeadTooLarge),
        ] {
            assert_eq!(head(bytes), Head::Bad(status), "{bytes:?}");
        }
    }

    #[test]
    fn a_reply_says_how_long_it_is() {
        let whole = reply(Status::Ok, "text/plain", "four", true);
        let text = String::from_utf8(whole.clone()).unwrap();
        assert!(
            text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\nfour"),
            "{text}"
        );
        assert!(text.contains("\r\nContent-Length: 4\r\n"), "{text}");
        assert_eq!(reply(Status::Ok, "text/plain", "four", false), whole[..whole.len() - 4]);
    }
}
